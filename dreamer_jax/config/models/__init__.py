"""Settings of the section `model`, one file and one dataclass a family."""
