"""`hacrl view`: runs, suites and hubs as a local web page, or as one HTML file.

live.py      one run, read while it trains
curves.py    the figures of a run
teaching.py  who teaches whom: samples of each learner by source
index.py     an SQLite index of all replies, built in the background
replies.py   filtered lists of replies; all replies to one problem
suite.py     a comparison of `hacrl compare`
hub.py       the public state of a hub
source.py    the runs and suites below a folder, and what the page can ask for
server.py    the web server: addresses, access, events
page.py      the HTML page, and the same page as one file with its data
export.py    --export: a run as one file
assets/      the page's JavaScript modules and style sheet, used as they are

Nothing here writes into a run or imports torch, `study` or `cli`.
"""
