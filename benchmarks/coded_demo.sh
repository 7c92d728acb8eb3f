#!/usr/bin/env bash
# The demo on one rank with float32 and with 8-bit class weights: verification accuracy of five seeds.
#
#   python demo/make_glyphs.py demo/output/glyphs
#   bash benchmarks/coded_demo.sh demo/output/glyphs build/coded_demo
#
# Bound, set before measuring: the mean over the seeds of the paired loss of accuracy is at most 0.5 points.
# Every run is a process with one thread, two at a time. Finished runs are not repeated.
set -euo pipefail
export data=$1 output=$2 OMP_NUM_THREADS=1
train() {
  local run=$output/$1-$2
  [[ -e $run/done ]] && return
  rm -rf "$run"
  plsc train --data.dataset_dir "$data" --data.val_targets glyphs_unseen --data.flip false --data.num_workers 0 \
    --model.name SmallResNet --model.image_shape [1,32,32] --model.emb_size 128 --model.dropout 0 \
    --train.global_batch_size 128 --train.epochs 3 --optim.lr 0.1 --train.test_batch_size 500 --train.seed "$2" \
    --head.row_dtype "$1" --checkpoint.save_dir "$run" --quiet
  touch "$run/done"
}
export -f train
for seed in 1 2 3 4 5; do echo "float32 $seed int8 $seed"; done | xargs -n 2 -P 2 bash -c 'train "$@"' train
python - <<'END'
import json, os, statistics
from pathlib import Path

def accuracy(dtype, seed):
    lines = (Path(os.environ["output"]) / f"{dtype}-{seed}" / "metrics.jsonl").read_text().splitlines()
    results = [line["eval"] for line in map(json.loads, lines) if "eval" in line]
    return 100 * results[-1]["glyphs_unseen"]["accuracy"]

values = {dtype: [accuracy(dtype, seed) for seed in range(1, 6)] for dtype in ("float32", "int8")}
for dtype, found in values.items():
    print(f"| {dtype} | {statistics.mean(found):.2f} | {', '.join(f'{value:.2f}' for value in found)} |")
losses = [one - other for one, other in zip(*values.values(), strict=True)]
print(f"loss {statistics.mean(losses):.2f}: {', '.join(f'{loss:.2f}' for loss in losses)}")
END
