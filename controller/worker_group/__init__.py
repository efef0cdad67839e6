"""The workers as the controller sees them, and the supervisor actor that creates and ends them. Modules here use Ray."""
