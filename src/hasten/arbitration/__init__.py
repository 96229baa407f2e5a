"""Arbitration at mismatches: whose token is kept where the draft's isn't the target's (CoSpec).

Lossy by design: what is emitted follows neither the target's law nor the draft's. The loop is the
one every method has (`hasten.decode`); `hasten.arbitration.loop` is a verifier for it. What of this
is a paper's and what is a reconstruction: docs/methods/cospec.md.
"""
