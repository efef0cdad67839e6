"""Version of the package, for parts that ``vescale_ray`` itself imports."""

__version__ = "0.1.0"
