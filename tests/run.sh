#!/usr/bin/env bash
# Lint, types, generated files, docs, then the tests: the fast ones first. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
ensure_environment dev

ruff check .
ruff format --check .
mypy
python tools/generate.py --check
python -m sphinx -q -W -b html docs build/docs
if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
python -m pytest -q -m "not slow"
python -m pytest -q -m slow
