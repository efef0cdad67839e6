"""What ``fully_shard`` does: check the arguments, collect the parameters, plan the groups, build the unit."""
