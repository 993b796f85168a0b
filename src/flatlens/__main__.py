"""`python -m flatlens`."""

from flatlens.cli import main

if __name__ == "__main__":
    main()
