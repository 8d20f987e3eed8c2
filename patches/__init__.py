"""The patches, one file a seam; a file's path under this directory is the patch's id."""

if __name__ != "spec_compat.patches":
    raise ImportError("import this package as spec_compat.patches, not as a top-level module")
