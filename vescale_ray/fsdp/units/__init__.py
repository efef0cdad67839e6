"""Units, which gather and reduce their groups together, and the schedule that all units of a root share."""
