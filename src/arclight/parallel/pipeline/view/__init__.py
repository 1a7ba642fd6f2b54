"""Draw recorded and predicted pipeline steps."""
