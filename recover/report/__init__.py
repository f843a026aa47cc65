"""Pages and pictures: what a run did, or would do, in a form that people and programs can read."""
