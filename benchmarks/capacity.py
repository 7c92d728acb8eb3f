"""Predict the FPIR of galleries of N from embeddings of m classes, and compare it with measured FPIRs.

python benchmarks/capacity_data.py demo/output/glyphs build/capacity --omniglot omniglot_small2.zip
python benchmarks/capacity.py build/capacity

The only input are .npz files with `embeddings` [n, D] and `labels` [n] of classes that the network never saw.

Protocol, fixed before anything was measured on these files:

Draws. 200 per m, from seeds [2024, m, draw]. A draw permutes the classes of a file: the first m calibrate, the
next 4 m are the pool of the gallery, the next 800 (or as many as are left: 798 for m = 500) are unknown.
glyphs.npz has about 3,300 classes: m = 50, 150, 500 and N = m, 2 m, 4 m. omniglot.npz has 156: m = 30,
N = 30, 60, with 66 unknown classes. The gallery of N are the first N classes of the pool, one random image
each. Probes are all images of the unknown classes; each class has the same weight.
Measured FPIR of a draw at threshold t: the weighted share of probes whose best score is at least t.

Cells. (m, N, level) for the levels 0.01, 0.05, 0.2 and 0.4. The threshold of a cell is the one where the
mean of the measured FPIR over its draws is the level. E = m level / (2 k) for N = k m is the number of class
pairs that are expected to exceed it among the calibration classes.

Ways. `plsc.evaluate.capacity`; and two rules with FAR from all images of the calibration classes, each pair of
classes with the same weight: 1 - (1 - FAR)^N, and FAR N, at most 1. Their 90 % intervals are the 5 % and 95 %
quantiles of 200 bootstraps of the classes; pairs of a class with its own copy are left out.

Criteria, per cell:
1. The 90 % interval covers the measured FPIR of the draw in 85 to 97 % of the draws. Where E < 1, counts are
   too coarse for 90 %: there, coverage above 97 % is expected and reported, and below 85 % is a failure.
2. The mean interval score (Gneiting and Raftery 2007, equation 43, alpha 0.1), divided by the level, is lower
   than that of both rules.
3. Where E >= 10, the point prediction is within a factor of 1.5 of the measured FPIR in 80 % of the draws; no
   point prediction counts as a miss. Where E < 10, the share of draws with a point prediction is reported.

Also reported: the measured FPIR at the threshold that each way returns for a wanted FPIR of 0.01, 0.05 and 0.2:
median, 5 % and 95 % quantile over the draws, and the share of draws without an answer.

Development used another network and other classes (--first 1500 of capacity_data.py, only the characters
0 to 1,499, seeds [1, m, draw]), and synthetic embeddings.
"""
