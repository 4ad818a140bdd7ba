"""What every recipe needs: arguments, data, answers, rewards, accuracy, a record, pictures, small bases."""
