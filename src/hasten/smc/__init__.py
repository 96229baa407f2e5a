"""SMC-SD: sequential Monte Carlo speculative decoding; lossy, the law is the target's in the limit.

A population of particles is extended by drafted tokens, weighed by the target, and resampled when
the weights grow uneven; nothing is rejected. docs/methods/smc.md says what follows the paper.
"""
