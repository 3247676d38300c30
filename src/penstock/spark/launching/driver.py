"""The program that spark-submit runs. This package must be installed there."""

import os
import sys

# Python first searches the directory of the program: modules here would hide others of that name.
sys.path[:] = [each for each in sys.path if each != os.path.dirname(os.path.abspath(__file__))]

from penstock.spark.launching.submit import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
