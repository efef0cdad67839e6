"""Shapes of the parameters of models, from known architectures and from users' models."""
