#!/usr/bin/env bash
# Create .venv with Penstock, its server, Spark and its development tools, unless it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/penstock.stamp
wanted=$(pwd && cat pyproject.toml constraints.txt)

# Two scripts started together would otherwise install over each other.
if command -v flock >/dev/null; then
  exec 9<constraints.txt
  flock 9
fi

if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  exit 0
fi

# Create the environment again if it was made elsewhere or only half made.
if [[ ! -x .venv/bin/python || $(head -n 1 "$stamp" 2>/dev/null) != "$PWD" ]]; then
  for python in python3 python3.14 python3.13 python3.12 python3.11 ''; do
    if [[ -z $python ]]; then
      echo "Penstock needs Python 3.11 or newer with its venv module" \
        "(Debian and Ubuntu: apt-get install python3 python3-venv)." >&2
      exit 1
    fi
    if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
    then
      break
    fi
  done
  echo "Making .venv with $("$python" --version)" >&2
  "$python" -m venv --clear .venv
fi

echo "Installing Penstock and its tools into .venv" >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
  --editable '.[all]' --constraint constraints.txt
printf '%s\n' "$wanted" >"$stamp"
