"""`python -m hacrl` runs the command `hacrl`."""

from hacrl.cli import main

if __name__ == "__main__":
    main()
