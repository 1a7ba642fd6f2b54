"""Payment payloads as text: tag-length-value objects, the rules for each, and the typed view of a whole payload."""
