"""The main job in one command: real conversations served from device, host and files, compared with no cache at all."""
