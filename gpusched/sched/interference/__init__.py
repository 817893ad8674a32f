"""How placement and neighbours slow a job down, and which GPUs are slow: fits of measurements, learned beliefs.

In: measured tables as arrays, or what ended attempts reported of their pace. Out: step times and ratios of speed, with
intervals. Pure. Begin with `placement` (one job alone) and `pairs` (beside others); `beliefs` is the same, learned
while the cluster runs; `gpus` finds GPUs that are slower than others of their type.

A step takes T = C + max over links l of S_l (1 + sum over neighbours j of d_jl), with S = a + b 2(K-1)/K for K GPUs.
"""
