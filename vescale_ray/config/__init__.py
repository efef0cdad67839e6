"""Configuration of a run: one YAML file, with dotted overrides for single keys. Every mistake is one line with the remedy.

``load_config(path, overrides)`` returns a frozen :class:`RunConfig`. The error for a mistyped key suggests the nearest known key. The
error for a bad value shows the key, the value and the bound. Sizes that don't match each other (workers, slots, heads) are errors
here, before anything starts. ``RunConfig.to_yaml()`` is the resolved form that the run's folder and each checkpoint keep.
"""

from vescale_ray.config.credentials import holds_credentials
from vescale_ray.config.data_section import DataSection
from vescale_ray.config.given import Given
from vescale_ray.config.model_section import ModelSection
from vescale_ray.config.reading import load_config, parse_config, read_config, sections
from vescale_ray.config.run_config import RunConfig
from vescale_ray.config.sections import (
    VOCAB,
    CheckpointSection,
    ConfigError,
    ElasticSection,
    MetricsSection,
    RaySection,
    RunSection,
    TrainSection,
    WandbConfig,
)

__all__ = [
    "VOCAB",
    "CheckpointSection",
    "ConfigError",
    "DataSection",
    "ElasticSection",
    "Given",
    "MetricsSection",
    "ModelSection",
    "RaySection",
    "RunConfig",
    "RunSection",
    "TrainSection",
    "WandbConfig",
    "holds_credentials",
    "load_config",
    "parse_config",
    "read_config",
    "sections",
]
