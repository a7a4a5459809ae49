"""The arithmetic of a decoder, as pure functions over one layer's parameters and one layer's KV buffer."""
