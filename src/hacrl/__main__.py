"""`python -m hacrl` runs the command `hacrl`."""

from __future__ import annotations

from hacrl.cli import main

if __name__ == "__main__":
    main()
