"""Failures: hangs, broken networks, stragglers and late exits are detected here; the failure budget and evidence are kept here."""
