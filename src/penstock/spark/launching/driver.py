"""The file that spark-submit runs. The package must be installed where it does."""

import os
import sys

# Python looks beside the file it runs first: modules here would hide others of the same names.
sys.path[:] = [each for each in sys.path if each != os.path.dirname(os.path.abspath(__file__))]

from penstock.spark.launching.submit import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
