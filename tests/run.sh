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

python -m sphinx -q -W -b html docs build/docs & # beside the other checks: each uses one core
ruff check .
ruff format --check .
mypy
python tools/generate.py --check
wait $!
if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
# More processes than cores, as tests also wait, each with one thread, as tests of several ranks bring their own.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
by_file=(-q -n 3 --dist loadfile --no-loadscope-reorder)  # in the order of tests/conftest.py
python -m pytest "${by_file[@]}" -m "not slow"
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.slow' tests)  # the others need not be collected
python -m pytest "${by_file[@]}" -m slow --durations 25 "${files[@]}"
