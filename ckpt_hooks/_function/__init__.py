"""Function frames: a region that is a call of a function, brought back by calling the function again."""
