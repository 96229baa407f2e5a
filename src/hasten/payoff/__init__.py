"""What a copied draft will pay, predicted before it is verified (HVD, arXiv 2606.01019)."""
