"""Progress bars: ``progress_bar`` is their base, ``rich_progress`` the default, ``tqdm_progress`` the other; ``timing`` estimates speed and time left."""
