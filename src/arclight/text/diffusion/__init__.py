"""Images from text by flow matching."""
