"""Search for the layout, the schedule and the memory settings with which a model trains fastest on given devices."""
