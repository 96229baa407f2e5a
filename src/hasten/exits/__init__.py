"""Exit modules: what turns a row's state after some of the target's layers into a draft."""
