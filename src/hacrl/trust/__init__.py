"""What an agent publishes, and which claims of its peers a learner trusts (docs/security.md).

    settings.py    the `[trust]` table
    publish.py     which rows and texts an agent publishes
    validate.py    rows with impossible values
    view.py        a closed step as one learner sees it, with its own verdicts
    quarantine.py  sequential tests of honesty
    caps.py        upper bounds of one peer's part
    defence.py     quarantine and caps, applied to a learner's samples

`hacrl.training` imports this package, not the reverse.
"""

from hacrl.trust.settings import Level, TrustConfig

__all__ = ["Level", "TrustConfig"]
