"""Tools for the people who run HiCache: what the files hold, whether they are whole, what may go, how large to make it.

Reads page files with the product's own code and needs neither an engine nor a device.
"""
