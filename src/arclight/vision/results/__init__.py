"""Results of a vision model: detections, their metrics, and pictures of both."""
