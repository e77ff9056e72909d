"""The board: published and own measurements of trainings, each with the plan that predicts it."""
