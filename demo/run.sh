#!/usr/bin/env bash
# Runs the demo: creates environment and dataset, trains on two ranks, evaluates, writes a report, exports the
# model for `plsc serve` and indexes the held-out images for `plsc search`.
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
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' demo/run.sh; exit ;;
    --fast) glyphs=(--classes 400 --images-per-class 8 --pairs 400) epochs=10 ;;
    -*) echo "run.sh: unknown option $argument; usage: bash demo/run.sh [--fast] [FOLDER]" >&2; exit 2 ;;
    /*) folder=$argument ;;
    *) folder=$here/$argument ;;
  esac
done
folder=${folder:-demo/output}

source tools/environment.sh
ensure_environment serve

data=$folder/glyphs run=$folder/run model=$folder/model gallery=$folder/gallery
if [[ ! -e $folder/made_by_demo && ( -e $run || -e $model || -e $gallery ) ]]; then
  echo "$folder has files that this script has not written; name a new folder" >&2
  exit 1
fi
mkdir -p "$folder" && touch "$folder/made_by_demo"
rm -rf "$run" "$model" "$gallery" "$model".sqlite* # of an earlier run of this script
python demo/make_glyphs.py "$data" ${glyphs[@]+"${glyphs[@]}"}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} torchrun --standalone --nproc-per-node 2 demo/train_glyphs.py "$data" "$run" --epochs "$epochs"
python demo/report.py "$data" "$run"

plsc export last "$model" --checkpoint.save_dir "$run" --data.dataset_dir "$data" \
  --data.val_targets glyphs_unseen --classes --thumbnails --unseen "$data/unseen"
plsc index "$model" "$gallery" --images "$data/unseen/images"
pictures=("$data"/unseen/images/0019/*.png) # of a character that is unlike the trained ones
echo "search with a picture of a class that the network never saw; the first result is the picture itself:"
echo "  .venv/bin/plsc search $model $gallery ${pictures[0]}"
echo "serve the trained classes; once you enrol ${pictures[0]}, it comes first in a search with ${pictures[1]}:"
echo "  .venv/bin/plsc serve $model"
cat "$run/summary.txt"
