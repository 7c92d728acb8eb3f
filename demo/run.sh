#!/usr/bin/env bash
# Runs the demo: creates environment and dataset, trains on two ranks, evaluates, writes a report.
#
#   bash demo/run.sh [--fast] [FOLDER]
#
# Output is written to FOLDER (default demo/output). --fast uses few classes and steps, so the accuracy is
# not meaningful.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

glyphs=() epochs=3 folder=""
for argument in "$@"; do
  case $argument in
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' demo/run.sh; exit ;;
    --fast) glyphs=(--classes 400 --images-per-class 8 --pairs 400) epochs=10 ;;
    -*) echo "run.sh: unknown option $argument; usage: bash demo/run.sh [--fast] [FOLDER]" >&2; exit 2 ;;
    /*) folder=$argument ;;
    *) folder=$here/$argument ;;
  esac
done
folder=${folder:-demo/output}

source tools/environment.sh
ensure_environment

data=$folder/glyphs run=$folder/run
python demo/make_glyphs.py "$data" ${glyphs[@]+"${glyphs[@]}"}
if [[ -e $run/metrics.jsonl ]]; then
  rm -r "$run" # an earlier run of this script
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} torchrun --standalone --nproc-per-node 2 demo/train_glyphs.py "$data" "$run" --epochs "$epochs"
python demo/report.py "$data" "$run"
python demo/recompute.py "$run"
python demo/recompute_protocols.py "$data" "$run"
cat "$run/summary.txt"
