"""Ground floor: model configs, warnings, inference mode, and the state of a recording."""
