"""`python -m penstock`: the command, for when its script is not on the PATH."""

from penstock.cli.main import main

if __name__ == "__main__":
    main()
