#!/usr/bin/env bash
# Measures and tests what needs a GPU, in slices of at most nine minutes; each survives the failure of another.
#
#   bash benchmarks/gpu.sh                   all slices in turn
#   bash benchmarks/gpu.sh 2                 slice 2 alone (benchmarks/gpu.py says what each is)
#   bash benchmarks/gpu.sh 2 --device cpu    at toy size, without a GPU
#   bash benchmarks/gpu.sh --fetch FOLDER    fill a folder for a machine without a network (benchmarks/rivals.py)
#
# $PYTHON (python3) is used if it has torch with CUDA, else .venv is made. Results go to $OUT (build/gpu). What
# Python lacks of other implementations comes from the folder $RIVALS (build/rivals), else from the package
# index, and goes to $RIVALS/site. A missing one is a row without figures.
set -uo pipefail
case ${1:-} in -h | --help) exec sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1 # so FOLDER, $RIVALS and $OUT are relative to the repository
[[ ${1:-} == --fetch ]] && exec "${PYTHON:-python3}" benchmarks/rivals.py fetch "${@:2}"

python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  source tools/environment.sh
  ensure_environment dev || exit 1
  python=python
fi
rivals=$(realpath -m "${RIVALS:-build/rivals}")
"$python" benchmarks/rivals.py install "$rivals"
export PYTHONPATH="$rivals/site${PYTHONPATH:+:$PYTHONPATH}"
# The C parts are for data on the CPU; plsc runs without them.
[[ -f plsc/data/native/libdata.so ]] || "$python" setup.py -q build_ext --inplace || true

slices=(1 2 3 4 5 6)
if [[ ${1:-} == [1-6] ]]; then
  slices=("$1")
  shift
fi
failed=()
for slice in "${slices[@]}"; do
  timeout --kill-after=15 525 "$python" benchmarks/gpu.py "$slice" "${OUT:-build/gpu}" "$@"
  code=$?
  echo "slice $slice ended with exit code $code"
  ((code == 0)) || failed+=("$slice")
done
((${#failed[@]} == 0)) || {
  echo "failed slices: ${failed[*]}" >&2
  exit 1
}
