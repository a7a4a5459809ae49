"""What a person did wrong, told in one line."""


class ToolError(Exception):
    """A wrong argument, or a folder that cannot be used; ends the program with status 2."""
