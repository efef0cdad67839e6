"""Optimizers of whole matrices: Muon and its variants, Shampoo, SOAP, and what computes and exchanges their matrices."""
