"""Detection of hangs, broken networks, stragglers and late exits; the failure budget; the evidence of failures."""
