"""Training of the learned parts (extra ``train``): data, exit modules, layer-skip variants."""
