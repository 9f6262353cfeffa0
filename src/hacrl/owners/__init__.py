"""Teams across owners: several owners train their own models and exchange signed texts over a hub.

signing.py    canonical JSON, Ed25519 keys, signed records
charter.py    the charter of a team and its amendments
batch.py      what a member publishes in a step: outcomes, texts and the signed envelope
hub/          the server: stores batches, closes steps, signs snapshots; it judges nothing
connection.py signed requests over HTTP, repeated while the hub is down
client.py     a member's connection: verifies receipts, snapshots and their chain
pool.py       the member's pool: sends batches, copies closed steps into the run directory
join.py       a member's config, from its own file and the charter

This package imports no torch. Everything that it reads from others is data: nothing in a charter or a
batch is imported or executed. Steps count from 0 here, as in the journals.
"""
