"""Check an installation and a config: devices, memory, data."""
