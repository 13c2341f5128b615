"""What ranks are doing, as others see it: the board that each rank writes, and the verdict on those that stand still."""
