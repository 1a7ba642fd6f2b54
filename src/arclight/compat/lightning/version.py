"""Which Lightning these names and habits are those of; code that asks ``lightning.__version__`` means that."""

__version__ = "2.6.6"
