#!/usr/bin/env bash
# Measures and tests what needs a GPU, in slices of at most nine minutes; each survives the failure of another.
#
#   bash benchmarks/gpu.sh                   all slices in turn
#   bash benchmarks/gpu.sh 2                 slice 2 alone (benchmarks/gpu.py says what each is)
#   bash benchmarks/gpu.sh 2 --device cpu    at toy size, without a GPU
#   bash benchmarks/gpu.sh computed          docs/benchmarks/computed.md, which needs no GPU
#   bash benchmarks/gpu.sh --fetch [...]     fill $RIVALS, to copy it to a machine without a network
#
# $PYTHON (python3) is used if it has torch with CUDA, else .venv is made. Results go to $OUT (build/gpu). What
# Python lacks of other implementations, and of what plsc needs besides torch, comes from the folder $RIVALS
# (build/rivals), else from the package index, and goes to $RIVALS/site. A missing one is a row without figures.
# Arguments after --fetch go to `pip download`: --python-version 3.12 --only-binary=:all: for another Python.
set -uo pipefail
case ${1:-} in -h | --help) exec sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1 # so $RIVALS and $OUT are relative to the repository
python=${PYTHON:-python3}
rivals=$(realpath -m "${RIVALS:-build/rivals}")
# torchvision is left out, because it belongs to one version of torch.
packages=(cut-cross-entropy liger-kernel pyarrow pybase64 simplejpeg safetensors fsspec PyYAML tqdm
  pytest iniconfig pluggy pytest-timeout hypothesis sortedcontainers)
# Two files of insightface (MIT licence).
insightface=https://raw.githubusercontent.com/deepinsight/insightface/7fadd420c2351d0ffa8cac403421c1a3ed733365
files=(partial_fc_v2.py losses.py)
pip() { timeout "$1" "$python" -m pip "${@:2}" --quiet --disable-pip-version-check --no-deps </dev/null; }

if [[ ${1:-} == --fetch ]]; then
  mkdir -p "$rivals"
  failed=()
  for package in "${packages[@]}"; do
    pip 300 download --dest "$rivals" "${@:2}" "$package" || failed+=("$package")
  done
  for file in "${files[@]}"; do
    curl -sfLo "$rivals/$file" "$insightface/recognition/arcface_torch/$file" || failed+=("$file")
  done
  ((${#failed[@]} == 0)) || { echo "could not fetch ${failed[*]}" >&2; exit 1; }
  exit
fi
if [[ -z ${PYTHON:-} ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  source tools/environment.sh
  ensure_environment dev || exit 1
  python=python
fi
mkdir -p "$rivals/site"
online=true
export PYTHONPATH="$rivals/site${PYTHONPATH:+:$PYTHONPATH}"
for file in "${files[@]}"; do
  [[ ! -f $rivals/$file ]] || cp "$rivals/$file" "$rivals/site"
done
for package in "${packages[@]}"; do
  "$python" -c 'import sys, importlib.metadata as m; m.version(sys.argv[1])' "$package" 2>/dev/null && continue
  pip 60 install --target "$rivals/site" "$package" --no-index --find-links "$rivals" 2>/dev/null && continue
  # The first failure may be a network that answers nothing.
  $online && pip 60 install --target "$rivals/site" "$package" --retries 0 --timeout 5 && continue
  online=false
  echo "$package is missing; where there is a network: bash benchmarks/gpu.sh --fetch"
done
# The C parts are for data on the CPU; plsc runs without them.
[[ -f plsc/data/native/libdata.so ]] || "$python" setup.py -q build_ext --inplace || true

slices=(1 2 3 4 5 6)
if [[ ${1:-} == [1-6] || ${1:-} == computed ]]; then
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
