#!/usr/bin/env bash
# Lint, types, generated files, docs, then the tests: the fast ones first.
#
#   bash tests/run.sh [arguments of pytest instead of the whole suite, tests/unit -k margin say]
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit
fi
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
# Two files at a time, each process with one thread: tests of several ranks bring their own processes.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
two=(-q -n 2 --dist loadfile --no-loadscope-reorder)  # in the order of tests/conftest.py
python -m pytest "${two[@]}" -m "not slow"
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.slow' tests)  # the others need not be collected
python -m pytest "${two[@]}" -m slow --durations 25 "${files[@]}"
