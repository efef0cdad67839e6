"""What users call on a sharded module: ``FSDPModule``, torch's state of a module, state dicts, and explanations."""
