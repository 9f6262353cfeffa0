"""The hub: a server through which the members of a team exchange batches.

records.py   the database and the files of batches
store.py     the rules: what is accepted, when a step closes, who receives what
gate.py      who sent a request: signatures, nonces and rate limits
app.py       the endpoints
server.py    starts the server (`hacrl hub`)

Members trust the hub to be reachable, to close steps on time and not to reveal a step early. They
verify everything else: batches are signed by their authors, snapshots are chained.
"""
