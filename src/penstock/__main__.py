"""`python -m penstock`: the command, for when its script is not on the PATH.

Python puts the working directory before everything else here, so a `json.py` in it would be taken
for the standard library's. It goes to the end: modules there, such as a router's, are still found.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))

    from penstock.cli.main import main

    main()
